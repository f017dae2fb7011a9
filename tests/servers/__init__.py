"""Tests of the servers room."""
