"""Lies here so that every test folder can import `tiny_models`."""
