"""The `laneformer` command: data, plans, exports."""
