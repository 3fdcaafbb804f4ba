"""Who am I: cluster descriptions, tasks and the resolvers that find them. Pure: environment in, frozen values out."""
