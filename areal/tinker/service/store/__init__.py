"""Durable state of the training server: tables, transactions, migrations, the lease, stored results and checkpoint folders."""
