"""Frozen networks: the integers that a device computes with are the definition of the network."""
