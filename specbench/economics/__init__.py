"""What speculation costs and saves: the break-even arithmetic, and the memory it takes."""
