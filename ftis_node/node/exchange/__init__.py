"""Link of an exchange node to the trainer on its machine: own groups come in, foreign groups go out."""
