"""The report's tables as plain text cells, for the terminal and for the HTML page alike."""
