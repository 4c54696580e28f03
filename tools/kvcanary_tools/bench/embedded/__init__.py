"""What drafting gains and checks cost with the embedded model, on a CPU or whatever there is."""
