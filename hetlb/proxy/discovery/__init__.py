"""Instances that come and go by themselves: files, DNS names, Kubernetes, registrations that expire."""
