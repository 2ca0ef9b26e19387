"""The hisparse-service command: one module a sub-command."""
