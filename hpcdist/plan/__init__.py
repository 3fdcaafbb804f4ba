"""Who owns which elements, and in which order: pure arithmetic, no communication."""
