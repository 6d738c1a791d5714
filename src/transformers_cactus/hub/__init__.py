"""A `custom_generate` repository for the Hub, written from this package."""

from .export import export_hub, push_to_hub

__all__ = ["export_hub", "push_to_hub"]
