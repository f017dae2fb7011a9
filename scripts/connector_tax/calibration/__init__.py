"""Calibration: does the pipeline recover connector taxes that are known exactly?"""
