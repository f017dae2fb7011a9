"""Where numbers come from: environment, manifest."""
