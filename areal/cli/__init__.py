"""Console script of the package: it parses a command line and starts what it names."""
