"""What the person in front of the room holds: agendas, a talk, a checklist, a quiz. No wheel has it."""
