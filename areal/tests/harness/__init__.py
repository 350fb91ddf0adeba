"""Infrastructure of the tests: worlds of ranks, worker pools, torchrun, and small engines and servers."""
