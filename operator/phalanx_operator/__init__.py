"""The operator: reconciles InferenceServices."""
