"""What starts something for the campaign."""
