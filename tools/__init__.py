"""The parts of `./dev`. `commands`, `environment` and `java` need only the standard library."""
