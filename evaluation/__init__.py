"""What a model can do: suites, the sandbox that runs generated code, scores."""
