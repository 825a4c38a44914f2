"""Study of cached states of recurrent layers: what prompts find by the policy that decides where states are cached."""
