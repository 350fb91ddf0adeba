"""Float8 training by torchao: its products, and layers that compute with them."""
