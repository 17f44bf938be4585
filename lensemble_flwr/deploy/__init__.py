"""Real machines: a site and a coordinator in one folder each, with keys, certificates and start scripts."""
