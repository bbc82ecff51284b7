"""Measurements, each beside a ceiling in the same run: `./dev bench`. Speed is judged here, never in a test."""
