"""The adaptive policy: chooses a step's trees by predicted acceptance and costs."""
