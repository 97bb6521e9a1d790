"""The one sampling path: prompts, pipeline, output."""
