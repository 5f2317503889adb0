"""Discrete-event simulation of a deployment, driving the policies that the servers run."""
