"""The methods: their table, and the section of the manifest that chooses one."""
