"""The Kubernetes operator of Postbus: definitions of custom resources, and what keeps them true."""
