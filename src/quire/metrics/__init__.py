"""What operators watch: counts and distributions of a serving engine, in Prometheus' format."""
