"""Who may do what, decided without I/O: `acls.py`. Brokers decide by it, and the console explains by it."""
