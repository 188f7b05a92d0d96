"""Stored responses of the Responses API, and conversations assembled from them."""
