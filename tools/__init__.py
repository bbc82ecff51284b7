"""What `./dev` is made of. `commands`, `environment` and `java` need only the standard library."""
