"""Open and verify an epoch, and read it into objects, with a job or without."""
