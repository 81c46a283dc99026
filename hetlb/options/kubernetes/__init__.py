"""Instances by Kubernetes' API."""
