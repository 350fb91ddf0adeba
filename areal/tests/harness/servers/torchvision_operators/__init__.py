"""What a process has in its PYTHONPATH to import torchvision beside a build of torch without its operators."""
