"""The web page that shows the service live."""
