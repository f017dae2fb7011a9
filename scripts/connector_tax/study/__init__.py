"""Measure a study: resolve the design, launch servers, measure cells and write their records."""
