"""HTTP interface of the training server: routes, protobuf and JSON."""
