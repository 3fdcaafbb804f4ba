"""Cluster descriptions, tasks, and the resolvers that derive them. Pure: environment in, frozen values out."""
