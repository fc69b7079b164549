"""What several suites share: models on disk, and their fixtures."""
