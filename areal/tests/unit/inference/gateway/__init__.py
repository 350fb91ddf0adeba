"""Tests of the gateway, through which agent programs generate."""
