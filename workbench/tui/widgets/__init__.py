"""The widgets: each receives one frozen value and draws it."""
