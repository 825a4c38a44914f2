"""Proposers that are models: they compute drafts on the device, in blocks with the ids of the target's."""
