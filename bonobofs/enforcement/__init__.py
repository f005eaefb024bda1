"""The enforcement point: each change is authorized and recorded here before it is made."""
