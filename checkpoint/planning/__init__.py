"""Who writes which bytes, whether replicas are alike, from plan to manifest."""
