"""TinyMoE: how the Mixture-of-Experts model that ships with moet is made; see README.md."""
