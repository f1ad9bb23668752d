"""What a run is built on: other runs, whose weights and history it takes along."""
