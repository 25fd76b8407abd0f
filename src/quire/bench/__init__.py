"""What measures servers and engines: workloads, a load generator and its HTTP client."""
