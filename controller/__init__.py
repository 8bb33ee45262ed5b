"""Decisions for the cluster: membership of workers, morphs of instances, and deployments."""
