"""Pages about runs served over HTTP, rendered anew when files change. Reads only, without torch."""
