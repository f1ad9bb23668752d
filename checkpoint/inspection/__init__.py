"""Looking at epochs without torch: what they hold, what changed between two, where it went bad."""
