"""Where the list of workers comes from: flags, DNS, or Kubernetes."""
