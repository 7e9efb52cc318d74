"""What every HTTP door shares: requests, limits, authorization."""
